// Package meshstatus reports the state of the mesh itself, and not of its workspaces and nodes.
//
// It asks the services for their health, and reads how far the event log is projected, how much space history takes and
// which consumers keep events from being cut. It serves EventService, RetentionService and ProjectionService: people of
// the operator list events, forget a consumer that no replica runs, and compare or rebuild the projections. It sends no
// command to an owner.
package meshstatus
