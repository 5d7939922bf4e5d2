"""Where parts are written: by processes of this machine, or by tasks of a Ray cluster.

events      what workers say
processes   local processes; interrupts keeps Ctrl-C from them
ray         a Ray cluster; the package ``ray`` is imported when it is asked for
"""
