package nodeapi

// Services returns the names of the services that are mounted at the internal port.
func (s *Service) Services() []string { return s.internal.Services() }
