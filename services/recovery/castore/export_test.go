package castore

// SetAtOnce sets the size of a table up to which a cut makes its index itself.
func (s *Store) SetAtOnce(bytes int64) { s.atOnce = bytes }
