"""`mlflow:/name`: a registered model of an MLflow server."""
