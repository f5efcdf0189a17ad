// Package diagnostics takes the diagnostic records of hosts that people bring, for machines whose agents reach no API.
//
// It believes that a person with the role operator brought the record, and nothing that the record says: package drift
// decides what it explains. Nothing here changes an identity or makes a node healthy. Guarantees: the same record twice
// is one event and one audit entry; entries with a code that this build does not know, or a time that is too long ago,
// are set aside alone and counted.
package diagnostics
