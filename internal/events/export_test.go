package events

// Listen makes a signal one that a connection listens for, until what it returns is called.
func Listen(s *Signal) func() { return s.listen() }
