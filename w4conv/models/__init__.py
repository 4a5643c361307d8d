"""Model families: config.json -> ModelSpec. One file a family; no arithmetic on weights."""
