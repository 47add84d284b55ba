"""The subcommands that look after sessions and the store, beside a running server or without."""
