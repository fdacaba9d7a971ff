"""What a person and other programs see of a run: files, console, plots, MLflow. Trouble here never ends training."""
