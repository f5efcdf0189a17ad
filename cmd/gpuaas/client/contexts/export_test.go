package contexts

// RemoveNamed removes the context of that name.
func RemoveNamed(path, name string) error {
	return removeIf(path, func(c Context) bool { return c.Name == name })
}
