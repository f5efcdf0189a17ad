package events

// Listen makes a signal one that a connection listens for, until what it returns is called.
func Listen(s *Signal) func() { return s.listen() }

// Stored returns the body of an event as Append stores it, and the name of its message.
func Stored(e Event) ([]byte, string, error) {
	c, err := e.content()
	if err != nil {
		return nil, "", err
	}
	return c.body, *c.bodyType, nil
}
