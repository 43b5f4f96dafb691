"""JSON documents as Arrow columns of a user's schema; knows neither Spark nor the store."""
