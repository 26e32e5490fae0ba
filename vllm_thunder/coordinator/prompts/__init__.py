"""What can be said of a prompt without tokenizing it: pure."""
