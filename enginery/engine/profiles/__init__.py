"""Shape profiles: notations, profiles from data, coverage."""
