// Package lookup decides which object a reference stands for, and which name stands beside an id.
//
// A reference is a name, an id, or six or more digits from the beginning or the end of an id. It finds nothing outside
// of the caller's scope. One that stands for several objects is refused with the first of them; none is chosen.
//
// It reads ids and names alone, by a connection that the caller gives it, and never what else is known of an object.
package lookup
