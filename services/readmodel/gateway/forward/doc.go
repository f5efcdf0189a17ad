// Package forward passes the commands of people on to the services that own the state.
//
// It serves CommandService and the services whose objects a person reads here and changes at an owner: allocations,
// instances, findings, incidents, keys and rollback mode. It resolves names in the scope of the person, so that an
// object of another tenant is answered as one that does not exist, and sends the request with a signed assertion of the
// person; the owner authorises it. It writes nothing, and leaves every other decision to the owner.
package forward
