// Package escalation collects all that the mesh knows of one workspace into one file, for people who were not there.
//
// It owns the form of the bundle: a zip with one JSON file a subject, `missing.json` for what could not be collected and why, and `manifest.json`, the
// last, with the size and the SHA-256 of every other file. It believes the projections, the owners' answers and the audit log, each as of the moment it
// was read. It never decides, never writes, never shows a person what the person could not list, and never lets a secret out: every message is cleaned
// before it is written.
//
// A source that fails makes a gap that is named; it never makes a bundle that looks whole and is not.
package escalation
