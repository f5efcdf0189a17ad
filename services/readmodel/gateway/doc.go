// Package gateway serves the queries of people and guards their port.
//
// It serves QueryService, AuditService and EscalationService from package view, in the scope of the person behind the
// call, and records in the audit log the requests that a person was refused for lack of a role: each of them, and many
// in a short time as a count. Edge is the middleware that refuses requests of sites that are not trusted. The package
// decides nothing about nodes, workspaces or policy, and sends no command; package forward does.
//
// Guarantees: a name or an id that belongs to another tenant is answered as one that does not exist; a read with
// min_pos includes the effect of the command that returned that position, or fails with position_not_reached.
package gateway
