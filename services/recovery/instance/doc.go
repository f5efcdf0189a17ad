// Package instance decides which instance of a workspace may enrol: it prepares an instance before lifecycle launches
// it, and retires one that has ended.
//
// It makes the rows of recovery.instance and of recovery.workspace_epoch, and launch secrets, which package enrol
// redeems. It knows neither keys nor certificates. It believes lifecycle about which instances there are, and only the
// database about which epoch of a workspace is the highest one.
//
// Guarantees: an epoch of a workspace has one instance, and another one only once the first has ended or if it never
// registered; an epoch below the highest one is refused; a repeated preparation changes nothing but a secret that was
// never used; an instance that was retired before it was prepared stays ended.
package instance
