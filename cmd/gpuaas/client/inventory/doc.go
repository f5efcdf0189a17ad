// Package inventory has the commands about what tenants may hold and what workspaces hold: tenants with their quotas,
// instances, claims and allocations.
//
// A forced release and the end of an instance lose data: they ask for the name of what is lost before they are sent.
package inventory
