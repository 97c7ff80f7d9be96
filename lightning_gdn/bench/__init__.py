"""Recipes, runs and comparisons: everything behind the `lightning-gdn` command.

`recipes` reads a YAML recipe into the `schema`, `arm` trains it once in a fresh process and writes one JSON record, `compare` runs
arms in turn and judges their records, `report`, `plot` and `wandb_sink` show the result.
"""
