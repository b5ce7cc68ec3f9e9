"""The planner: verdict, threshold, split and size of a deployment."""
