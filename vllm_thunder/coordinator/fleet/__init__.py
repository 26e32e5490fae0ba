"""Programs, engines and who runs where: pure, no clock and no event loop."""
