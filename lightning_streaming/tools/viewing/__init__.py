"""Looking at a dataset or a run in the browser: what is looked at, pages made of it, and who may see them."""
