"""Recipes: one YAML file that names a model and the stages to take it through."""

from enginery.recipe.model import Recipe, Step
from enginery.recipe.stages import STAGES

__all__ = ["STAGES", "Recipe", "Step"]
