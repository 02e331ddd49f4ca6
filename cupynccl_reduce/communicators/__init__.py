"""One module per transport: collectives on a stream. Nothing about parameters or buckets."""
