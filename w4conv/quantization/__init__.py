"""How numbers become codes: the readable reference, search, AWQ, GPTQ, codebooks, recipes, budgets of bits."""
