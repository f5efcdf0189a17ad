// Package inuse finds which process listens on an address that a mesh on one machine was told to use.
//
// It trusts only a bind: an address is free if this process could listen on it a moment ago. The process is found in
// /proc, for the text of the error alone; it is never signalled. The package reserves nothing: package ports does.
package inuse
