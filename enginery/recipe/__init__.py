"""Recipes: one YAML file that names a model and the stages to take it through."""

from enginery.recipe.model import STAGES, Recipe, Step

__all__ = ["STAGES", "Recipe", "Step"]
