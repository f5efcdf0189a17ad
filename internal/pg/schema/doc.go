// Package schema makes the databases of the mesh: its roles and their rights, its tables by the migrations, and the
// declaration that a database was restored.
//
// It runs as an administrator or as the schema's owner, never as a service: `gpuaas migrate`, the development mesh,
// benches and tests call it. Package pg, which services use, has none of it, so that no service links what applies
// migrations.
//
// Guarantees: Migrate and Provision may be run by several processes at once and any number of times; DeclareRestored
// changes nothing while a service is connected.
package schema
