package list

import "github.com/google/uuid"

// OneID returns the filter for one id. A text that is no id matches nothing.
func OneID(id string) []string {
	if !IsID(id) {
		return []string{}
	}
	return []string{id}
}

// IsID reports whether s is an id in the database's format.
func IsID(s string) bool {
	parsed, err := uuid.Parse(s)
	return err == nil && parsed.String() == s
}

// OptionalID returns an id as an argument: NULL if it is empty, and the nil id, which no object has, if it is no id.
func OptionalID(id string) any {
	switch {
	case id == "":
		return nil
	case !IsID(id):
		return uuid.Nil.String()
	default:
		return id
	}
}
