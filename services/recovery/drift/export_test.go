package drift

// Catalogue returns the rows of all reasons, in the order of the enum.
func Catalogue() []Row {
	out := make([]Row, 0, len(rows)-1)
	for reason := 1; reason < len(rows); reason++ {
		out = append(out, rows[reason])
	}
	return out
}
