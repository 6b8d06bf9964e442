"""Recipes: YAML files that name a model and the stages to run."""

from enginery.recipe.model import Recipe, Step
from enginery.recipe.stages import STAGES

__all__ = ["STAGES", "Recipe", "Step"]
