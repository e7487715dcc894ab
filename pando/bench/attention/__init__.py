"""`pando bench attention`: attention alone, over plans that anyone can bring."""
