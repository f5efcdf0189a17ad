// Package names owns how states, reasons and messages are spelled outside Go: in JSON, SQL, logs and metric labels.
//
// A state or reason is spelled as its proto value name without the enum's prefix, in lower case (`active`,
// `cert_expired`); a task type has a dot between what it acts on and what it does (`workload.deploy`). Messages are
// printed by one marshaller, MarshalJSON. The package derives every spelling from the descriptors and never invents one
// of its own.
//
// Guarantees: Parse(Of(x)) is x for every declared value; MarshalJSON prints the same bytes for equal messages.
//
// It is a package of its own because a spelling must be one for all: the services, the agent, the command line and the
// columns of the database have no other package in common that could own it.
package names
