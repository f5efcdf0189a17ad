package drill

// Complete reports whether a drill can be run and controlled.
func Complete(d Drill) bool { return d.run != nil && d.mutated != "" }
