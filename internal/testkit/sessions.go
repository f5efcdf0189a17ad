package testkit

import "fmt"

// Disconnect closes the connections of a role's pool and waits until the server has none of that role to the database:
// the server's process of a closed connection ends a moment after it.
func Disconnect(d *Database, role string) {
	d.t.Helper()
	d.Pool(role).Reset()
	Eventually(d.t, Patience, func() error {
		var left int
		err := d.OwnerPool().QueryRow(Context(d.t), `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND usename = $1`, role).Scan(&left)
		if err == nil && left > 0 {
			err = fmt.Errorf("%d sessions of %s are left", left, role)
		}
		return err
	})
}
