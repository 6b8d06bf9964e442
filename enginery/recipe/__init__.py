"""Recipes: YAML files that name a model and the stages to run."""

from enginery.recipe.model import Recipe
from enginery.recipe.steps import STAGES, Step

__all__ = ["STAGES", "Recipe", "Step"]
