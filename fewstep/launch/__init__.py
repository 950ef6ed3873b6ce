"""Ways to run a recipe: in this process; others are files beside this one."""
