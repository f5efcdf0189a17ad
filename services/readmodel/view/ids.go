package view

import (
	"github.com/google/uuid"
)

// idList returns the filter for one id. A text that is no id matches nothing.
func idList(id string) []string {
	if !isUUID(id) {
		return []string{}
	}
	return []string{id}
}

func isUUID(s string) bool {
	parsed, err := uuid.Parse(s)
	return err == nil && parsed.String() == s
}

// optional returns an id as an argument: NULL if it is empty, and the nil id, which no object has, if it is no id.
func optional(id string) any {
	switch {
	case id == "":
		return nil
	case !isUUID(id):
		return uuid.Nil.String()
	default:
		return id
	}
}
