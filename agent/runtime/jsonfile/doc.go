// Package jsonfile keeps values as JSON in files that a crash leaves whole.
//
// Write replaces a file by a rename, after the new content is on disk. It does not lock: two programs that write the
// same file must agree on which of them does. A write that is cut short leaves a file whose name Unfinished reports.
package jsonfile
