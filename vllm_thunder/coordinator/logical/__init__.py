"""Books of engines that know no programs: pure."""
