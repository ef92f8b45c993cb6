package seam

// restartOldOpens has nothing to do: this architecture never had open and creat.
func restartOldOpens() error { return nil }
