// Package client speaks to a Cove server: it creates sandboxes, runs code and commands in them and moves files.
// It needs nothing but the standard library.
//
//	c, err := client.FromEnv() // COVE_URL, COVE_API_KEY
//	sb, err := c.Create(ctx, client.CreateRequest{Template: "python"})
//	defer sb.Kill(context.WithoutCancel(ctx))
//	out, err := sb.Run(ctx, client.RunRequest{Code: "1 + 1"})
//	fmt.Println(out.Text()) // 2
//
// The types in wire.go are the API's own JSON; the server's OpenAPI file is generated from them. A failure that the
// server explained is an *Error; KindOf tells what can be done about it.
package client
