"""The data source `mirror`: documents and changes of a mirror or its source, in Arrow batches."""
