package readmodel

// PeopleAddr returns the address of the people's port.
func (s *Service) PeopleAddr() string { return s.people.Addr().String() }
