"""One module per host-blocking side channel: small messages. Never gradients."""
