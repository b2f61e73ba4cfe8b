from jaxpaged._command_line import main

if __name__ == "__main__":
    main()
