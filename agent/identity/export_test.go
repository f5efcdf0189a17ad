package identity

// FormerProfile returns the fingerprint of the profile to which RevertProfile goes back; empty: there is none.
func (s *Store) FormerProfile() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.former == nil {
		return ""
	}
	return s.former.Fingerprint
}
