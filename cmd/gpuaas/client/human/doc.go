// Package human turns values into text for people: amounts of storage, durations, the names of enum values, and lines
// that fit a terminal.
//
// It knows no command and no message of the API. It does not print, except one line by Note.
//
// Guarantees: Clean leaves no control character and no escape sequence in a text, so that a text from a node or a
// tenant cannot control the terminal.
package human
