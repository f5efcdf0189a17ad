// Package tenants decides which tenants there are, how much each may have at once, and what of them a caller may see:
// a tenant or a workspace of another tenant is not found, like one that does not exist. It owns lifecycle.tenant. It
// knows no operation, and begins none.
package tenants
