"""Recipes shipped with lightning-gdn, as package data; `lightning-gdn recipes` lists them."""
