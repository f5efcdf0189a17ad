// Package escalation collects all that the mesh knows about one workspace into one file, for people who did not watch
// the incident.
//
// It owns the form of the bundle: a zip with one JSON file a subject, `missing.json` for what could not be collected
// and why, and `manifest.json`, the last, with the size and the SHA-256 of every other file. It trusts the projections,
// the owners' answers and the audit log, each as of the moment it was read. It decides nothing, changes nothing,
// includes nothing that the person could not list, and includes no secret: every message is cleaned before it is
// written.
//
// A source that fails is listed in missing.json, so a bundle that lacks something never looks complete.
package escalation
