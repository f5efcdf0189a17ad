package redisserver

// Addr returns the host:port of the server.
func (s *Server) Addr() string { return s.addr() }
