from paddock.cli import main

main()
