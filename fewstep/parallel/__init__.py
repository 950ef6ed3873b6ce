"""Many ranks: who they are, how weights are spread over them, how numbers are summed."""
